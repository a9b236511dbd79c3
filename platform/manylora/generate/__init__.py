"""`manylora generate`: prompts from a JSONL file, answers to another, resumable after a kill."""
