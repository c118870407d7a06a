"""Conversion between Hugging Face models and Ironlaw's: `config.json` and ModelConfig, safetensors and weights."""
