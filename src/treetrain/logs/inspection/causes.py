"""The causes of lost sharing: their names in reports, and what to change."""

_AS_THEY_ARE = "; if the policy really saw these prompts, train on them as they are"

CAUSES: dict[str, tuple[str, str]] = {
    "padding": (
        "padding inside the rows",
        "give an attention_mask with the rows, or cut the padding off; it is no part of a trajectory",
    ),
    "front": (
        "one token at the front",
        "begin every row alike: add the token (often BOS) to all rows or to none",
    ),
    "truncation": (
        "older tokens cut off on the left",
        "raise the context length of the rollouts, or drop whole conversations that are too long instead of their "
        "beginnings",
    ),
    "think": (
        "think blocks of earlier turns dropped or added by the chat template",
        "use a template that keeps every turn as it was sampled (--chat-template chatml), in the rollouts too"
        + _AS_THEY_ARE,
    ),
    "rewritten": (
        "earlier answers written differently by the chat template",
        "use a template that writes a message the same way whatever follows it (--chat-template chatml), in the "
        "rollouts too" + _AS_THEY_ARE,
    ),
    "history": (
        "history that the harness rewrites between calls",
        "let the harness append only: no compaction, cleared tool results, reminders or re-serialised arguments inside "
        "the history" + _AS_THEY_ARE,
    ),
    "retokenised": (
        "the same text tokenised differently",
        "pass token ids on from call to call; do not decode a completion and tokenise it again with the next prompt",
    ),
    "whitespace": (
        "stripped or added white space",
        "pass messages on unchanged: no strip() between sampling, logging and the next prompt",
    ),
    "order": (
        "the same tools, or the keys of their schemas, in another order",
        "sort the tools, and the keys of their schemas, before the prompt is rendered",
    ),
    "tool list": (
        "different tools, or different schemas of the same tools",
        "offer all rows the same tools, or put the tools that vary last",
    ),
    "dates": (
        "dates or times that differ inside the prompt",
        "fix the date for all rows of a batch, or move it behind the text that all rows share",
    ),
    "ids": (
        "ids that differ inside the prompt",
        "leave the id out of the prompt, or move it behind the text that all rows share",
    ),
    "values": (
        "values that differ inside the prompt",
        "fix the value for all rows of a batch, or move it behind the text that all rows share",
    ),
    "changed": (
        "earlier tokens changed",
        "give --tokenizer: the text tells a chat template from tokens that were decoded and tokenised again",
    ),
}
