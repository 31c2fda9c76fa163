"""Take position away from a head and measure what the model loses."""
