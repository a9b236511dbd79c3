"""Text in, token ids out and back: tokenizer, chat template, streaming decode, stop strings.

Only `tokenizers`, sandboxed Jinja2 and the standard library, so that the control plane may
import it: `processor.py` is the way in, `detokenizer.py` and `stops.py` serve the engine.
"""
