"""Memory, time, cost and goodput of a run before it is started. PURE but for the command itself."""
