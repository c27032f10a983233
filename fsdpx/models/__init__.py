"""Models that people have, from the folders in which they have them; docs: models."""

from fsdpx.models.chat import chat_template
from fsdpx.models.operators import from_state_dict, to_state_dict
from fsdpx.models.reading import from_pretrained
from fsdpx.models.writing import save_pretrained

__all__ = ["chat_template", "from_pretrained", "from_state_dict", "save_pretrained", "to_state_dict"]
