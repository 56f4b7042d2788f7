"""Tuning: trials, studies and the files that they write."""
