"""Tests, and what they share (`tests.helpers`)."""
