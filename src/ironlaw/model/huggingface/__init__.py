"""Hugging Face models: `config.json` to ModelConfig and back, safetensors to our weights and back."""
