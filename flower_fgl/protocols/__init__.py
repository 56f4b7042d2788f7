"""Payloads that server and clients exchange, and their byte formulas."""
