from specdec.async_llm import AsyncLLM as AsyncLLM
from specdec.config import SpeculativeConfig as SpeculativeConfig
from specdec.engine_thread import EngineDeadError as EngineDeadError
from specdec.llm import LLM as LLM
from specdec.output import CompletionOutput as CompletionOutput
from specdec.output import RequestOutput as RequestOutput
from specdec.sampling import SamplingParams as SamplingParams
