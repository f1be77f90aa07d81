"""At most so many tokens through the model at a time: `max_tokens_per_batch`.

What is a batch stays as it was: `per_device_train_batch_size` rows, drawn by the sampler of TRL,
with TRL's loss over all of them. So the data, their order, the number of steps on every rank,
checkpoints, and gradient accumulation are those of a run by row counts, and so are loss, gradients
and metrics, also of losses that tie rows together (KTO's baseline, `aot`'s sorting, quantiles).
Only the calls of the model change. `groups` puts the rows of a call together by their tokens; each
group goes through the model alone, and TRL's loss gets the outputs of all of them.

The loss says only afterwards what gradient each output receives. So the groups but the last run
without a graph, TRL computes its loss and differentiates it in the outputs, which stand for the
model as leaves (`gradients`), and then each group runs again with a graph and backwards with the
gradients of its own outputs. That second forward is the price, at most a third of a step, and only
of batches that do not fit. The head knows its gradients there, so that it makes them in its forward
whatever the loss. Where the gradients follow from the group itself, as on-policy GRPO's, RLOO's and
distillation's do up to a factor known from the batch before, there is no second forward; a
prediction that fails is corrected by what it lacked, exactly, since gradients add.

Each pass through the model is forward and backward by itself, under the trainer's gradient scaler
and autocast, with the random state of its first run; DDP and FSDP communicate in the last one only.
Other ways were worse: a sampler by tokens changes what a step is on each rank, and weights for
losses of parts exist for losses that are means over rows only, and for none of TRL's metrics, which
it gathers over ranks once a batch.
"""
