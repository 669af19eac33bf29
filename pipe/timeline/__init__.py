"""Where did a step's time go? Traces of steps, what they say, and where they are shown. Imports no torch."""

PLUGIN = "pipeline"
"""The name of the TensorBoard plugin that owns the series of traces."""
TAG = "pipeline"
"""The tag of that series: one a run."""
SCALARS = "pipeline/"
"""What the tags of the scalars that come with a trace begin with."""
