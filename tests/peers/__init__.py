"""Keras' own tests, unchanged, while a strategy of this package is in force. See `python -m tests.peers --help`."""
