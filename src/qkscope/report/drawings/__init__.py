"""Pictures of their own kind, which lenses name in a `Drawing`: each function takes results and returns a figure."""
