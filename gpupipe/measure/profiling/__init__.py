"""Where the time goes, in three steps: the pipeline alone, the training step alone, and both together."""

from gpupipe.measure.profiling.three_steps import ProfileReport, StageFigures, profile

__all__ = ["ProfileReport", "StageFigures", "profile"]
