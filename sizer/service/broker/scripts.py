"""What happens on the board in one step, in Redis' own language: nobody else sees it half done.

Each script has one question at a time; its keys are those that `sizer.service.broker.board.Board` gives it.
"""

from __future__ import annotations

# Put a question in its line, unless it is there, is being answered, or has its answer; whether it was put (1) or not (0).
# The rank is that of fair queueing by finish times: what its visitor has in the line already, or the present, and its cost.
PUT = """
local wanted, answer, lease, line, question, virtual, own = unpack(KEYS)
local digest, text, cost, reader, wanted_seconds, seconds = unpack(ARGV)
redis.call('SADD', wanted, reader)
redis.call('EXPIRE', wanted, wanted_seconds)
local last = redis.call('XREVRANGE', answer, '+', '-', 'COUNT', 1)[1]
if last and last[2][2] == 'result' then return 0 end
if last and last[2][2] == 'error' then redis.call('DEL', answer) end
if redis.call('EXISTS', lease) == 1 or redis.call('ZSCORE', line, digest) then return 0 end
local now = tonumber(redis.call('GET', virtual) or '0')
local finish = math.max(now, tonumber(redis.call('GET', own) or '0')) + tonumber(cost)
redis.call('SET', own, finish, 'EX', seconds)
redis.call('SET', question, text, 'EX', seconds)
redis.call('ZADD', line, finish, digest)
redis.call('EXPIRE', line, seconds)
return 1
"""

# Take the first question of a line that somebody still waits for; its digest, nothing where there is none.
TAKE = """
local line, virtual = unpack(KEYS)
local worker, lease_ms, seconds, wanted, lease, question = unpack(ARGV)
while true do
  local digest, rank = unpack(redis.call('ZPOPMIN', line))
  if not digest then return false end
  if redis.call('EXISTS', wanted .. digest) == 1 then
    redis.call('SET', lease .. digest, worker, 'PX', lease_ms)
    redis.call('SET', virtual, rank, 'EX', seconds)
    return digest
  end
  redis.call('DEL', question .. digest)
end
"""

# A worker's sign of life: 1 where its question is wanted, 0 where it is not any more, -1 where it is not this worker's any more.
BEAT = """
local wanted, lease = unpack(KEYS)
local worker, lease_ms = unpack(ARGV)
if redis.call('GET', lease) ~= worker then return -1 end
redis.call('PEXPIRE', lease, lease_ms)
return redis.call('EXISTS', wanted)
"""

# Add to an answer what a worker says, where the question is its own still; the last word ends it. Whether it was added.
SAY = """
local answer, lease, question = unpack(KEYS)
local worker, kind, data, seconds = unpack(ARGV)
if redis.call('GET', lease) ~= worker then return 0 end
redis.call('XADD', answer, '*', 'kind', kind, 'data', data)
redis.call('EXPIRE', answer, seconds)
if kind == 'result' or kind == 'error' then
  redis.call('XTRIM', answer, 'MAXLEN', 1)
  redis.call('DEL', lease, question)
end
return 1
"""

# Give a question back, where it is this worker's still.
GIVE_BACK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

# Keep a tape beside those of its architecture, of which there may be so many bytes.
KEEP = """
local tapes, held = unpack(KEYS)
local name, data, most, seconds, least, names = unpack(ARGV)
least = tonumber(least)
local there = redis.call('HEXISTS', tapes, name)
if there == 0 and redis.call('HLEN', tapes) >= tonumber(names) then return 0 end
local more = math.max(string.len(data), least)
if there == 1 then more = more - math.max(redis.call('HSTRLEN', tapes, name), least) end
if tonumber(redis.call('GET', held) or '0') + more > tonumber(most) then return 0 end
redis.call('HSET', tapes, name, data)
redis.call('INCRBY', held, more)
redis.call('EXPIRE', tapes, seconds)
redis.call('EXPIRE', held, seconds)
return 1
"""
