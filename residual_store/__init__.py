"""Residual Store: format and engine."""
