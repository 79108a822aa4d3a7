"""From raw text to micro-batches.

Building: sources -> tokenizer -> packing -> build -> format. Reading: order -> blocks -> objective -> batch -> loader.
"""
