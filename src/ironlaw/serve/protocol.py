"""Request bodies of OpenAI's completion and chat APIs, with vLLM's fields, and their conversion for the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from ironlaw.errors import UserError
from ironlaw.serve.request import SamplingParams

# Fields that clients often send, and that do not affect the answers of a single server.
_IGNORED = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "parallel_tool_calls", "spaces_between_special_tokens",
)  # fmt: skip
_UNSUPPORTED = (
    "tools", "tool_choice", "functions", "function_call", "audio", "modalities", "suffix", "web_search_options",
    "prediction", "reasoning_effort", "verbosity",
)  # fmt: skip
_EMPTY_VALUES: tuple[Any, ...] = (None, [], {}, "", "none", "auto", ["text"])  # values of these that ask for nothing
_MAX_SEED = 2**63
MAX_GRAMMAR_LENGTH = 2**16  # characters of a regular expression or a grammar: a million take seconds to read


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    name: str = "answer"
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")  # others take a schema here, which would not be followed
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=MAX_GRAMMAR_LENGTH)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, max_length=MAX_GRAMMAR_LENGTH)


class RequestBody(BaseModel):
    """Fields of both APIs."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-_MAX_SEED, lt=_MAX_SEED)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[int, float] | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("the body is not a JSON object")
        asked = [name for name in _UNSUPPORTED if data.get(name) not in _EMPTY_VALUES]
        if asked:
            raise ValueError(f"{asked[0]} is not supported by this server: leave it out")
        # Clients send null for the default.
        return {k: v for k, v in data.items() if k not in (*_IGNORED, *_UNSUPPORTED) and v is not None}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        stops = self.stops
        if len(stops) > 16 or any(not 0 < len(s) <= 1000 for s in stops):
            raise ValueError("stop is at most 16 strings of 1 to 1000 characters")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream = true")
        for bias in (self.logit_bias or {}).values():
            if not -100 <= bias <= 100:
                raise ValueError("logit_bias is between -100 and 100")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def grammar(self) -> tuple[str, Any] | None:
        """Return the kind and text of the answer's constraint, as `constrain.compile_grammar` takes them, or None."""
        form, other = self.response_format, self.structured_outputs
        if form is not None and form.type != "text":
            if other is not None:
                raise UserError("response_format and structured_outputs both give the answer's form: send one of them")
            if form.type == "json_object":
                return "json_schema", {"type": "object"}
            if form.json_schema is None:
                raise UserError("response_format.json_schema is missing: give its schema")
            return "json_schema", form.json_schema.schema_
        if other is not None:
            given = [("json_schema", other.json_), ("regex", other.regex), ("choice", other.choice),
                     ("grammar", other.grammar)]  # fmt: skip
            chosen = [pair for pair in given if pair[1] is not None]
            if len(chosen) != 1:
                raise UserError("structured_outputs takes one of json, regex, choice and grammar")
            return chosen[0]
        return None

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        if self.min_tokens > max_tokens:
            raise UserError(f"min_tokens = {self.min_tokens} is more than the max_tokens of {max_tokens}: use as many")
        return SamplingParams(
            max_tokens=max_tokens, temperature=self.temperature, top_k=max(0, self.top_k), top_p=self.top_p,
            min_p=self.min_p, presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, seed=self.seed, stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids), ignore_eos=self.ignore_eos, min_tokens=self.min_tokens,
            logprobs=logprobs, logit_bias=tuple((self.logit_bias or {}).items()),
            include_stop=self.include_stop_str_in_output,
        )  # fmt: skip


class CompletionRequest(RequestBody):
    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _prompts(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported by this server: use n")
        if len(self.prompt) == 0:
            raise ValueError("prompt is empty: send some text")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 asks for nothing: use 1 or more, or send echo = true and logprobs")
        return self

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        return replace(super().sampling(max_tokens, logprobs), scores_prompt=self.echo and logprobs is not None)

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = ""
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _words(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("tool_calls") or data.get("function_call")):
            raise ValueError("tool calls are not supported by this server: leave them out")
        if isinstance(data, dict) and data.get("role") in ("tool", "function"):
            raise ValueError("a tool's answer is to no call here, for tool calls are not supported: leave it out")
        parts = data.get("content") if isinstance(data, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") not in (None, "text"):
                kind = str(part["type"])[:50]
                raise ValueError(f"content of type {kind!r} is not supported by this server: send text")
        return data

    def plain(self) -> dict[str, Any]:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(RequestBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _tops(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs = true")
        if "messages" in (self.chat_template_kwargs or {}):
            raise ValueError("chat_template_kwargs has no messages: the body has them")
        return self
