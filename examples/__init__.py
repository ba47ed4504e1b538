"""Runnable examples that come with tared."""
