"""Where did a step's time go? Traces of steps, what they say, and where they are shown. Imports no torch."""
