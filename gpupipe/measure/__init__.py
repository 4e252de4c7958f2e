"""Measuring: how fast a loader is, against what people run today; and what works on a machine."""
