"""What an output depends on: attention, rollout, integrated gradients and Shapley values, and how they differ."""
