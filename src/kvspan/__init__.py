"""kvspan: a long-context inference engine whose KV cache spans devices."""
