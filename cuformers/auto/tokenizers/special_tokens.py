"""The tokens with a role: bos, eos, unk, sep, pad, cls, mask, those a model names itself, and nameless extra ones."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

from tokenizers import AddedToken

from cuformers.base.errors import bad_argument

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = "extra_special_tokens"
EXTRA_OLDER = "additional_special_tokens"


class _Token:
    """Attribute `x_token`: the token's text or None. Setting needs a token of the vocabulary."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, holder: None, owner: type) -> "_Token": ...
    @overload
    def __get__(self, holder: "SpecialTokens", owner: type) -> str | None: ...
    def __get__(self, holder: "SpecialTokens | None", owner: type) -> "str | _Token | None":
        return self if holder is None else holder.special_tokens_map.get(self._name)

    def __set__(self, holder: "SpecialTokens", value: str | AddedToken | None) -> None:
        holder._set_named(self._name, value)


class _TokenId:
    """Attribute `x_token_id`: the token's id or None."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removesuffix("_id")

    @overload
    def __get__(self, holder: None, owner: type) -> "_TokenId": ...
    @overload
    def __get__(self, holder: "SpecialTokens", owner: type) -> int | None: ...
    def __get__(self, holder: "SpecialTokens | None", owner: type) -> "int | _TokenId | None":
        return self if holder is None else holder._named_id(self._name)

    def __set__(self, holder: "SpecialTokens", value: int | None) -> None:
        token = None if value is None else holder.convert_ids_to_tokens(value)
        if value is not None and token is None:
            raise bad_argument(f"{self._name}_id", value, f"an id below {len(holder)}")
        holder._set_named(self._name, token)


class SpecialTokens:
    """The part of a tokenizer that knows its special tokens. The rest of it supplies the vocabulary's methods."""

    _named: dict[str, str | AddedToken]
    _extra: list[str | AddedToken]

    bos_token, eos_token, unk_token, sep_token = _Token(), _Token(), _Token(), _Token()
    pad_token, cls_token, mask_token = _Token(), _Token(), _Token()
    bos_token_id, eos_token_id, unk_token_id, sep_token_id = _TokenId(), _TokenId(), _TokenId(), _TokenId()
    pad_token_id, cls_token_id, mask_token_id = _TokenId(), _TokenId(), _TokenId()

    def __len__(self) -> int:
        raise NotImplementedError

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        raise NotImplementedError

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        raise NotImplementedError

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        raise NotImplementedError

    def _knows(self, token: str) -> bool:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # only called for what is no ordinary attribute: tokens that a model names itself, such as image_token
        named = self.__dict__.get("_named", {})
        if name in named:
            return str(named[name])
        if name.removesuffix("_id") in named:
            return self.convert_tokens_to_ids(str(named[name.removesuffix("_id")]))
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The tokens with a name, as {"bos_token": "<s>", ...}."""
        ordered = dict.fromkeys([*NAMES, *self._named])
        return {name: str(self._named[name]) for name in ordered if name in self._named}

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without a role."""
        return [str(token) for token in self._extra]

    @extra_special_tokens.setter
    def extra_special_tokens(self, value: Sequence[str | AddedToken]) -> None:
        self._extra = list(value)

    @property
    def extra_special_tokens_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.extra_special_tokens)

    additional_special_tokens = extra_special_tokens
    additional_special_tokens_ids = extra_special_tokens_ids

    @property
    def all_special_tokens(self) -> list[str]:
        """Named and extra special tokens, each once."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def add_special_tokens(
        self,
        special_tokens_dict: Mapping[str, str | AddedToken | Sequence[str | AddedToken]],
        replace_extra_special_tokens: bool = True,
    ) -> int:
        """Gives roles to tokens, e.g. {"pad_token": "<pad>"}, and adds those that the vocabulary lacks.

        Returns how many were added: so many rows the model's embedding is short of.
        """
        added: list[str | AddedToken] = []
        roles: dict[str, str | AddedToken] = {}
        for name, value in special_tokens_dict.items():
            if name in (EXTRA, EXTRA_OLDER):
                if isinstance(value, (str, AddedToken)) or not all(isinstance(t, (str, AddedToken)) for t in value):
                    raise bad_argument(name, value, "a list of tokens")
                held = self.extra_special_tokens
                tokens: list[str | AddedToken] = [
                    _special(t) for t in value if replace_extra_special_tokens or str(t) not in held
                ]
                self._extra = tokens if replace_extra_special_tokens and tokens else self._extra + tokens
                added += tokens
            elif name in NAMES or name in self._named:
                if not isinstance(value, (str, AddedToken)):
                    raise bad_argument(name, value, "a string or an AddedToken")
                roles[name] = _special(value)
                added.append(roles[name])
            else:
                raise bad_argument("special_tokens_dict", name, f"one of {', '.join((*NAMES, EXTRA))} as its keys")
        count = self.add_tokens(added, special_tokens=True)
        self._named.update(roles)
        return count

    def get_special_tokens_mask(self, token_ids: Sequence[int], already_has_special_tokens: bool = True) -> list[int]:
        """1 for each id that is a special token, 0 for the others."""
        if not already_has_special_tokens:
            raise bad_argument(
                "already_has_special_tokens", False, "True", "Pass return_special_tokens_mask=True when encoding."
            )
        special = set(self.all_special_ids)
        return [int(int(i) in special) for i in token_ids]

    def _named_id(self, name: str) -> int | None:
        token = self._named.get(name)
        return None if token is None else self.convert_tokens_to_ids(str(token))

    def _set_named(self, name: str, value: str | AddedToken | None) -> None:
        if value is None:
            self._named.pop(name, None)
            return
        if not isinstance(value, (str, AddedToken)):
            raise bad_argument(name, value, "a string, an AddedToken or None")
        if not self._knows(str(value)):
            remedy = f"Add it with add_special_tokens({{{name!r}: {str(value)!r}}}) and resize the embedding."
            raise bad_argument(name, str(value), "a token of the vocabulary", remedy)
        self._named[name] = value


def _special(token: str | AddedToken) -> AddedToken:
    return token if isinstance(token, AddedToken) else AddedToken(token, normalized=False, special=True)
