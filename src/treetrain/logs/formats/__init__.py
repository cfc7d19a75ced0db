"""The formats of logs: what a record is recognised by, and the function that makes rows of token ids or messages of it.

A tracing tool is a `Log`, a mapping that says where the tool keeps the parts of an LLM call.
"""

from treetrain.logs.formats import agents, batches, columns, conversations, events, nodes, search_trees, tokens, traces
from treetrain.logs.formats.traces import Log
from treetrain.logs.records import Format

NODE_KEYS = ("tokens", "input_ids", "token_ids", "messages", "message", "parent")
NODES = " | ".join(f"{place}.0.{name}" for place in ("nodes", "traces.0.nodes") for name in NODE_KEYS)
TAU = "traj | simulations | simulation_index tasks | reward_info task_id messages"
BATCHES = "batch.responses | input_ids attention_mask responses | input output score | prompt responses data_source"
SESSIONS = (
    "uuid sessionId | type leafUuid | type messageId snapshot | type sessionId operation | type sessionId aiTitle"
)
EVENTS = "source kind timestamp | source action timestamp | source observation timestamp"
API_CALL = r"completions?\.create|messages\.create|responses\.create|generate_content|litellm\.completion|\.converse"
LANGSMITH = Log(
    kind="run_type",
    calls="^llm$",
    below="child_runs",
    tools=("extra.invocation_params.tools", "inputs.tools"),
    model=("extra.invocation_params.model", "extra.metadata.ls_model_name"),
    rewards=("feedback_stats",),
)
LANGFUSE = Log(kind="type", calls="^GENERATION$", below="observations", episode=("traceId", "trace_id"))
BRAINTRUST = Log(
    kind="span_attributes.type",
    calls="^llm$",
    system=("metadata.instructions",),
    tools=("metadata.tools",),
    model=("metadata.model",),
    episode=("root_span_id",),
)
WEAVE = Log(kind="op_name", calls=API_CALL, model=("inputs.model",))
OPIK = Log(kind="type", calls="^llm$", rewards=("feedback_scores",), tools=("metadata.tools",))
AGENTS_SDK = Log(
    kind="span_data.type",
    calls="^(generation|response)$",
    prompt=("span_data.input",),
    answer=("span_data.output", "span_data.response"),
    tools=("span_data.response.tools", "span_data.model_config.tools"),
    model=("span_data.model",),
)

FORMATS = (
    Format("verl", BATCHES, agents.read_verl),
    Format("tokens", "input_ids", lambda record, notes: [record], tokens=True),
    Format("atropos", "tokens masks scores", batches.read_atropos, tokens=True),
    Format("nemo-rl", "token_ids token_loss_mask", batches.read_nemo_rl, tokens=True),
    Format("prime-rl", "token_ids loss_mask inference_logprobs", batches.read_prime_rl, tokens=True),
    Format("nodes", NODES, nodes.read_nodes),
    Format("sglang", "the text of a response of SGLang", tokens.read_sglang_text, tokens.is_sglang_text),
    Format("server", "the token ids of a server's response", tokens.read_server, tokens.is_server, tokens=True),
    Format("steps", "the token ids of prompts and answers", tokens.read_steps, tokens.is_steps, tokens=True),
    Format("art", "trajectories.0.messages_and_choices | messages_and_choices | group_index messages", agents.read_art),
    Format("areal", "interactions of AReaL", traces.read_areal, traces.is_areal),
    Format("swe-agent", "history trajectory", agents.read_swe_agent),
    Format("mini-swe-agent", "trajectory_format messages", agents.read_mini_swe_agent),
    Format(
        "tau-bench",
        TAU,
        agents.read_tau,
        session=agents.of_run,
    ),
    Format("bfcl", "inference_log result", agents.read_bfcl),
    Format("inspect", "eval samples | messages epoch scores", agents.read_inspect),
    Format("toolbench", "answer_generation tree", agents.read_toolbench),
    Format("tree-of-thoughts", "steps.0.new_ys", agents.read_thoughts),
    Format("claude-code", SESSIONS, events.read_claude_code, session=events.of_file),
    Format("codex", "type payload", events.read_codex, session=events.of_file),
    Format("openhands", "history instance_id", events.read_openhands),
    Format("openhands-events", EVENTS, events.read_openhands, session=events.of_file),
    Format("atif", "schema_version steps agent", events.read_atif),
    Format(
        "spans",
        "attributes of OpenTelemetry, OpenInference, OpenLLMetry or MLflow",
        traces.read_spans,
        traces.is_spans,
        session=traces.rollout_of,
    ),
    Format("langsmith", "run_type", LANGSMITH),
    Format("braintrust", "span_attributes", BRAINTRUST, session=lambda _, span: ("trace", span.get("root_span_id"))),
    Format("weave", "op_name inputs", WEAVE),
    Format("opik", "type trace_id input feedback_scores", OPIK),
    Format("agents-sdk", "span_data", AGENTS_SDK),
    Format("langfuse", "observations.0.type | type input output traceId | type input output trace_id", LANGFUSE),
    Format(
        "batch",
        "`custom_id` of a batch",
        conversations.read_batch,
        conversations.is_batch,
        session=lambda _, record: ("custom_id", record.get("custom_id")),
    ),
    Format("oasst", "message_id message_tree_id text", search_trees.read_message_tree, session=search_trees.in_tree),
    Format("search-tree", "a tree of `children`", search_trees.read_search_tree, search_trees.is_search_tree),
    Format("sharegpt-pairs", "conversations chosen rejected", columns.read_sharegpt_pair),
    Format("openai-preference", "preferred_output non_preferred_output", columns.read_openai_preference),
    Format("alpaca", "instruction output | instruction chosen | query response", columns.read_instructions),
    Format("preference", "chosen rejected", conversations.read_preference),
    Format("requests", "a `request` and its `response`", conversations.read_requests, conversations.is_request),
    Format("chat", "`messages`", conversations.read_chat, conversations.is_chat),
    Format("sharegpt", "conversations", conversations.read_sharegpt),
    Format("completion", "completion", conversations.read_completion),
    Format("answers", "prompt response | input_prompt output_response | input output", columns.read_answers),
    Format(
        "messages",
        "role content | role parts | role message.content | kind parts",
        events.read_messages,
        session=events.of_file,
    ),
)
"""Tried in this order on the first record."""
