"""From the command line to a checked configuration, and from there to processes and objects."""
