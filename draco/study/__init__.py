"""What is read from finished runs: tables, figures, pages, replays, evaluations, plans."""
