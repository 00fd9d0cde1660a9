"""Tests. `tests.helpers` contains the code that several tests share."""
