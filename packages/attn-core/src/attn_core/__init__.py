"""The contract of attn: mechanisms, specs, states, kernels, models and how plugins are found. No torch."""
