"""Continuous batching: requests that come and go while the engine runs, behind Transformers' names."""
