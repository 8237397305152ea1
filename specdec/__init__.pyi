from specdec.llm import LLM as LLM
from specdec.options import AsyncEngineArgs as AsyncEngineArgs
from specdec.requests.intake import TextPrompt as TextPrompt
from specdec.requests.intake import TokensPrompt as TokensPrompt
from specdec.requests.output import CompletionOutput as CompletionOutput
from specdec.requests.output import RequestOutput as RequestOutput
from specdec.requests.params import RequestOutputKind as RequestOutputKind
from specdec.requests.params import SamplingParams as SamplingParams
from specdec.requests.structured_outputs import (
    StructuredOutputsParams as StructuredOutputsParams,
)
from specdec.serve.async_llm import AsyncLLM as AsyncLLM
from specdec.serve.engine_thread import EngineDeadError as EngineDeadError
from specdec.speculative_config import SpeculativeConfig as SpeculativeConfig

__version__: str
