"""Several processes: reductions over them, and sharding of the frozen weights."""
