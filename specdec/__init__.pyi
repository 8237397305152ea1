from specdec.config import SpeculativeConfig as SpeculativeConfig
from specdec.llm import LLM as LLM
from specdec.output import CompletionOutput as CompletionOutput
from specdec.output import RequestOutput as RequestOutput
from specdec.sampling import SamplingParams as SamplingParams
