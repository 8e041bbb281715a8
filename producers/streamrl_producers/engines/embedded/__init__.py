"""A small continuous-batching sampler on torch: for laptops, CI and the first five minutes."""
