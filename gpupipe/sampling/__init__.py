"""Which samples, in which order, on which rank."""
