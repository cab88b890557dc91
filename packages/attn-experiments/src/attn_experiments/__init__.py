"""Claims about attention reproduced on a laptop, and explanations of models beside their attention."""
