from hypothesis import settings

# A busy machine is no fault of a mask; what is found must be found again.
settings.register_profile("attn", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("attn")
