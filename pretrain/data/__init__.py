"""From raw text to micro-batches: sources -> tokenizer -> packing -> build -> format, then order -> blocks -> batch -> loader."""
