"""One call to a language model through litellm, and what it costs."""
