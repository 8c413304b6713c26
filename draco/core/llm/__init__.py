"""One request to a language model through litellm, and what it costs.

transport.py   sends a request and reads the reply: `Transport`, `Endpoint`, `Reply`
faults.py      what a failed request means, and when it is repeated: `Fault`, `retrying`
money.py       tokens, prices and the price table
redact.py      removes keys from texts
library.py     imports litellm at first use
"""
