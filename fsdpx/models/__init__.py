"""Load pretrained models of other projects from folders or state dicts (docs: models)."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.models.chat import chat_template as chat_template
    from fsdpx.models.field_models import from_state_dict as from_state_dict, to_state_dict as to_state_dict
    from fsdpx.models.pretrained_reader import from_pretrained as from_pretrained
    from fsdpx.models.pretrained_writer import save_pretrained as save_pretrained
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
