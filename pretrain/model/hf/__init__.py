"""Exchange with Hugging Face transformers, both ways: enter through `directory`. One file per family of theirs."""
