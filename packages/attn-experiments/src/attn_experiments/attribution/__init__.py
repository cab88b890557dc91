"""Attribution of outputs to input tokens: attention, rollout, integrated gradients, Shapley values, comparisons."""
