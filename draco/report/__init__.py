"""Tables, figures and the HTML page of runs."""
