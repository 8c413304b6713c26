"""From a command line to a checked configuration.

arguments.py   the options of a command: `draco VERB key=value …`
compose.py     a configuration from its files and overrides, and objects from a configuration
choices.py     errors of Hydra in one line, with the valid choices; overrides that nothing would read
options.py     values are checked against type annotations
rules.py       a configuration is checked before anything is built
"""
