"""Convert between text and tokens with a model's tokenizer, chat template and end tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from edge_spec.core.model_info import TOOL_TEMPLATE, SpecialTokens
from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.chat_template import ChatTemplate, PromptOptions, template_kwargs
from edge_spec.text.control_tokens import CONTROL_TEXT, ControlTokens
from edge_spec.text.infill import Infill
from edge_spec.text.parts.answer_form import (
    SWITCHES,
    AnswerForm,
    ThoughtForm,
    thought_budget,
    thought_form,
)
from edge_spec.text.plain_messages import Message, Tools, plain_messages, with_ordered_results
from edge_spec.text.template_traits import (
    ANSWER,
    FOLLOW_UP,
    TemplateTraits,
    fitted,
    with_arguments,
)
from edge_spec.text.token_pieces import TokenPieces

if TYPE_CHECKING:
    from edge_spec.text.tools.formats import ToolForm

_TAIL_TOKENS = 32  # the end of a prompt, in which a thought may be opened
# Sources of end tokens that no file declares.
BY_NAME, BY_TEMPLATE = "its name", "the chat template"
# End of an answer, turn or message; then those that end an infill: padding, and the beginnings of
# another file or repository.
END_NAMES = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"),
        *("<eos>", "[EOS]", "[e~[", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<turn|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<end_of_turn>"),
        *("<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
        *("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
_END, _TAG, _BEGIN = "<|end|>", "</s>", "<s>"
_EOS_OF_PLAMO = "<|plamo:eos|>"
# In vocabularies with the first tokens, the other one occurs within answers: as the end of a part
# such as a thought, or as an HTML tag.
_WITHIN = (
    ({"<|return|>", "<|call|>"}, _END),
    ({"<|calls|>", "<|flush|>"}, _END),
    ({"<|tool_response>"}, _TAG),
    ({_EOS_OF_PLAMO}, _TAG),
)


class OpenedTemplate:
    """A compiled chat template with its traits and control tokens. Raises UnsupportedModelError."""

    def __init__(
        self,
        source: str | None,
        special_tokens: SpecialTokens,
        codec: TextCodec,
        ends: Collection[int],
    ) -> None:
        """ends: tokens that end or begin a text."""
        self.template = ChatTemplate(source, special_tokens=special_tokens)
        self.traits = TemplateTraits(self.template.render, codec.added_tokens)
        self.control_tokens = ControlTokens(codec, self.template, self._around, ends)
        self._codec = codec

    @cached_property
    def thought(self) -> ThoughtForm | None:
        """How the model marks thoughts; None if it has none."""
        return thought_form(self.template.source, self.traits.shown, self._codec.added_tokens())

    def _around(self) -> str:
        return self.traits.conversation.partition(FOLLOW_UP)[0]

    def render(self, messages: Sequence[Message], tools: Tools, options: PromptOptions) -> str:
        try:
            messages, tools = fitted(messages, tools, self.traits)
        except RecursionError:
            raise _too_deep() from None
        budget = thought_budget(options.get("reasoning"))
        if budget is None:
            return self.template.render(messages, tools, **options)
        own, switches = template_kwargs(options), dict.fromkeys(SWITCHES, budget > 0)
        given = {**switches, **own} if budget else {**own, **switches}
        switched: PromptOptions = {**options, "template_kwargs": given}
        try:
            prompt = self.template.render(messages, tools, **switched)
        except EdgeSpecError:
            prompt = self.template.render(messages, tools, **options)
        # Close an empty thought that the template opens regardless of the switch, as templates with
        # a switch do.
        if budget == 0 and (form := self.thought) and form.is_opened_by(prompt):
            prompt += form.ending_after(prompt)
        return prompt


class MessagePrompt(list[int]):
    """A prompt at whose end a message begins: a leading space that the tokenizer adds there is not
    part of the text."""


@dataclass(frozen=True)
class ChatFormat:
    """Encodes text and messages for one model, and decodes its tokens."""

    tokenizer: TextCodec
    chat_template: str | None
    eos_ids: tuple[int, ...]  # if declared, the one that the chat template knows comes first
    bos_id: int | None
    sampling: RecommendedSampling = NOTHING_STATED
    parse_special: bool = False  # whether control tokens in messages are recognized, too
    named_templates: Mapping[str, str] = field(default_factory=dict)  # besides `chat_template`
    special_tokens: SpecialTokens = field(default_factory=dict)  # as passed to templates
    end_sources: Mapping[int, str] = field(default_factory=dict)  # what declares each of eos_ids

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """Return the tokens that ask for the assistant's next message; a string is a user message.

        Messages and tools are adapted to the template (`fitted`). What they contain stays text,
        unless `parse_special`. Raises UsageError for malformed input, UnsupportedModelError if the
        template still refuses the messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.parse_special:
            ids = self.tokenizer.encode(self.rendered(messages, tools, **options))
        else:
            opened = self._for(tools)
            try:
                plain = with_arguments(_plain(messages))
                ids = opened.control_tokens.encode(opened.render, plain, tools, options)
            except RecursionError:
                raise _too_deep() from None
        return ids if options.get("continue_final_message") else MessagePrompt(ids)

    def rendered(
        self, messages: Sequence[Message], tools: Tools = (), **options: Unpack[PromptOptions]
    ) -> str:
        """Return the text of the prompt. Raises like `chat_prompt`."""
        return self._for(tools).render(_plain(messages), tools, options)

    def answer_form(
        self, prompt: Sequence[int], tools: Tools = (), **options: Unpack[PromptOptions]
    ) -> AnswerForm | None:
        """Return the parts that the answer to a prompt may have; None if it is all text. Takes the
        arguments of `chat_prompt`, and raises like it."""
        thought = self._for(tools).thought
        calls = self.tool_form() if tools else None
        if calls is None and thought is not None and thought.lead:
            from edge_spec.text.tools.formats import HARMONY

            # Models that write headers before thoughts write them before text and calls, too.
            calls = HARMONY if thought.opening.startswith(HARMONY.markers) else None
        budget = thought_budget(options.get("reasoning"))
        form = AnswerForm(budget=budget, calls=calls, tools=tools)
        if thought is None:
            return form if tools else None
        form = replace(form, thought=thought.without_lead if tools else thought)
        if options.get("continue_final_message"):
            _, opening, begun = self._markup(self._last_turn(prompt)).rpartition(thought.opening)
            is_opened = bool(opening) and thought.closing not in begun
            held = form.thought if is_opened else None
            is_begun = is_opened and bool(begun.strip())
            return replace(form, is_opened=is_opened, is_begun=is_begun, thought=held)
        begun = self._markup(prompt[-_TAIL_TOKENS:])
        return replace(
            form,
            is_opened=thought.is_opened_by(begun),
            is_closed=thought.is_passed_by(begun),
            text_opening="" if tools else thought.text_opening_after(begun),
        )

    def _last_turn(self, prompt: Sequence[int]) -> Sequence[int]:
        ends = (place for place in reversed(range(len(prompt))) if prompt[place] in self.eos_ids)
        return prompt[next(ends, -1) + 1 :]

    def _markup(self, tokens: Sequence[int]) -> str:
        stream, special = self.tokenizer.stream(), self.tokenizer.special_text
        return "".join(stream.push(token) or special(token) for token in tokens)

    def tool_form(self) -> ToolForm:
        """Return the model's tool-call format. Raises like `template`."""
        from edge_spec.text.tools.formats import GENERIC

        native = self._with_tools.traits.native_tools
        return GENERIC if native is None else native.form

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template supports tools. Raises like `template`."""
        return self._with_tools.traits.native_tools is not None

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The names that `template_kwargs` may have. Raises like `template`."""
        return self._without_tools.template.variables | self._with_tools.template.variables

    def prompt_of(self, text: str, **options: Unpack[PromptOptions]) -> list[int]:
        """Return `chat_prompt`'s tokens, or, without a chat template, those of the text to
        continue."""
        if self.chat_template is None:
            return self.tokenizer.encode(text)
        return self.chat_prompt(text, **options)

    def template(self) -> ChatTemplate:
        """Raises UnsupportedModelError without a template, or with one that does not compile."""
        return self._without_tools.template

    @property
    def control_tokens(self) -> ControlTokens:
        """The control tokens of conversations without tools. Raises like `template`."""
        return self._without_tools.control_tokens

    @property
    def conversation(self) -> str:
        """A prompt with a question, `ANSWER` and `FOLLOW_UP`; "" if the template refuses. Raises
        like `template`."""
        return self._without_tools.traits.conversation

    @cached_property
    def pieces(self) -> TokenPieces:
        return TokenPieces(self.tokenizer)

    @cached_property
    def infill(self) -> Infill:
        """Raises UnsupportedModelError if the model was not trained for infilling."""
        return Infill(self.tokenizer, self.special_tokens, self.eos_ids)

    def _for(self, tools: Tools) -> OpenedTemplate:
        return self._with_tools if tools else self._without_tools

    @cached_property
    def _without_tools(self) -> OpenedTemplate:
        return self._opened(self.chat_template)

    @cached_property
    def _with_tools(self) -> OpenedTemplate:
        source = self.named_templates.get(TOOL_TEMPLATE)
        return self._without_tools if source is None else self._opened(source)

    def _opened(self, source: str | None) -> OpenedTemplate:
        ends = {*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))}
        tokens = {**self._tokens_by_id(), **self.special_tokens}
        return OpenedTemplate(source, tokens, self.tokenizer, ends)

    def _tokens_by_id(self) -> SpecialTokens:
        """The tokens that templates use most, which model files often do not name."""
        found = (BY_NAME, BY_TEMPLATE)
        stated = (token for token in self.eos_ids if self.end_sources.get(token) not in found)
        ids = {"bos_token": self.bos_id, "eos_token": next(stated, None)}
        return {
            name: self.tokenizer.token_text(token)
            for name, token in ids.items()
            if token is not None
        }


def _plain(messages: Sequence[Message]) -> Sequence[Message]:
    return with_ordered_results(plain_messages(messages))


def _too_deep() -> UsageError:
    return UsageError(
        "the messages or tools are nested too deeply", remedy="Give them fewer levels."
    )


def with_every_end(text: ChatFormat, vocab_size: int) -> ChatFormat:
    """Add end tokens found by name or from the template, after the declared ones: the chat template
    knows the very first. Drop tokens outside the logits."""
    sources = {id: text.end_sources.get(id, "") for id in text.eos_ids if id < vocab_size}
    ids = {name: text.tokenizer.token_id(name) for name in (*END_NAMES, _BEGIN, _EOS_OF_PLAMO)}
    known = {name: id for name, id in ids.items() if id is not None and id < vocab_size}
    within = {known[name] for needed, name in _WITHIN if needed <= known.keys() and name in known}
    named = {id for name, id in known.items() if name in END_NAMES} - within
    if not text.tokenizer.special_text(known.get(_BEGIN, -1)) and (sources or len(named) > 1):
        named.discard(known.get(_TAG, -1))  # HTML, as in the vocabularies of Gemma and Qwen
    for id in sorted(named):
        sources.setdefault(id, BY_NAME)
    turn_end = _turn_end(text)
    if turn_end is not None and turn_end not in within and turn_end < vocab_size:
        sources.setdefault(turn_end, BY_TEMPLATE)
    return replace(text, eos_ids=tuple(sources), end_sources=sources)


def _turn_end(text: ChatFormat) -> int | None:
    """Return the control token that the template writes after an answer; None without one, if it
    also begins a message, or if the template refuses."""
    try:
        before, _, after = text.conversation.partition(ANSWER)
    except EdgeSpecError:
        return None
    turn_end = _first_control(text, after.partition(FOLLOW_UP)[0])
    return None if turn_end == _first_control(text, before) else turn_end


def _first_control(text: ChatFormat, rendered: str) -> int | None:
    """Some tokenizers do not mark control tokens as special, so their look counts, too."""
    for token in text.tokenizer.encode(rendered):
        is_control = text.tokenizer.special_text(token) or CONTROL_TEXT.fullmatch(
            text.tokenizer.token_text(token)
        )
        if is_control and token != text.bos_id:
            return token
    return None
