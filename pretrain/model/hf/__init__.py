"""Exchange with Hugging Face transformers: the decoder as a Llama or Qwen3 directory, both ways."""
