"""Does a program that nobody wrote train distributed as on one device? `python -m tests.fuzz --seconds 300`."""
