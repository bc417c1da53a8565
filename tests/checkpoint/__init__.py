"""Tests of what is saved, and of what is read after a crash."""
