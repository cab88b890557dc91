"""Language models of the recurrent era: LSTMs that attend to their past, and machines with a memory."""
