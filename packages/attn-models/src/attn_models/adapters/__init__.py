"""State dict adapters: config.json and tensor names of other libraries' checkpoints, translated to ours and back."""
