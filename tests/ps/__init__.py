"""Tests of the parameter-server policies and books."""
