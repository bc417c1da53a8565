"""Does a program that nobody wrote train distributed as it does on one device? `python -m tests.fuzz --seconds 300 --seed 1`."""
