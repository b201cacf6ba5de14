# mypy: ignore-errors
"""Record spans of Python clients against a local server: ``python_clients.py NAME > CASE.toml``.

NAME is one of: pydantic_ai, pydantic_ai_same_names, logfire_openai, openinference_openai,
openllmetry_openai, opentelemetry_openai_v2, strands.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version

from fake_openai import serve
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recording import case_text

os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
URL, KEY, MODEL = serve(), "none", "gpt-4o-mini"
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)


def client():
    from openai import OpenAI

    return OpenAI(base_url=URL, api_key=KEY)


def ask(client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    client.chat.completions.create(model=MODEL, messages=messages)
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    for _ in stream:
        pass
    client.embeddings.create(model="text-embedding-3-small", input="hello")


def pydantic_ai(*, same_names: bool = False) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.instrumented import InstrumentationSettings
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    settings = InstrumentationSettings(
        tracer_provider=provider, use_aggregated_usage_attribute_names=not same_names
    )
    try:
        from pydantic_ai.capabilities import Instrumentation

        agent = Agent(model, capabilities=[Instrumentation(settings)])
    except ImportError:
        agent = Agent(model, instrument=settings)

    @agent.tool_plain
    def weather() -> str:
        return "sunny"

    agent.run_sync("hello")
    return "pydantic-ai-slim"


def logfire_openai() -> str:
    import logfire

    logfire.configure(
        send_to_logfire=False,
        console=False,
        additional_span_processors=[SimpleSpanProcessor(exporter)],
    )
    asked = client()
    logfire.instrument_openai(asked)
    ask(asked)
    return "logfire"


def openinference_openai() -> str:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    ask(client())
    return "openinference-instrumentation-openai"


def openllmetry_openai() -> str:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    ask(client())
    return "opentelemetry-instrumentation-openai"


def opentelemetry_openai_v2() -> str:
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    ask(client())
    return "opentelemetry-instrumentation-openai-v2"


def strands() -> str:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    @tool
    def weather() -> str:
        """The weather."""
        return "sunny"

    model = OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL)
    asyncio.run(Agent(model=model, tools=[weather], callback_handler=None).invoke_async("hello"))
    return "strands-agents"


NAMES = {
    "pydantic_ai": pydantic_ai,
    "pydantic_ai_same_names": lambda: pydantic_ai(same_names=True),
    "logfire_openai": logfire_openai,
    "openinference_openai": openinference_openai,
    "openllmetry_openai": openllmetry_openai,
    "opentelemetry_openai_v2": opentelemetry_openai_v2,
    "strands": strands,
}

if __name__ == "__main__":
    name = sys.argv[1]
    package = NAMES[name]()
    head = {
        "id": name.replace("_", "-"),
        "source": f"{package} {version(package)} from PyPI, with opentelemetry-sdk "
        f"{version('opentelemetry-sdk')}",
        "input": "TODO",
        "right": "TODO",
    }
    print(case_text(head, exporter.get_finished_spans()), end="")
